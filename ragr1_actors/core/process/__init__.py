"""Process and terminal: interrupts, imports, code of users, progress bars, commands that messages advise."""
