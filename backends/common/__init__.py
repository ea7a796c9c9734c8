"""What several backends share: printers of array libraries, noise, constants of arithmetic, threads."""
