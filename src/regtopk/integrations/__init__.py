"""Trainers of others, each in a file that is imported by name: none comes with `import regtopk`."""
