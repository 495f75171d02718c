"""Data sets from where the user has them, and how their examples are divided among workers."""
