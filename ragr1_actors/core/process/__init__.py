"""This process and the terminal around it: interrupts, imports, code of users, progress, commands to advise."""
