"""Modules shared by several backends: printers of array libraries, noise, constants of arithmetic, threads."""
