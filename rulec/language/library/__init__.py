"""Rules by name: those that ship with rulec, in files, in packages and by https."""
