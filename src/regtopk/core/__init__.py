"""The words that algorithms and drivers share: what is sent, asked, kept and counted."""
