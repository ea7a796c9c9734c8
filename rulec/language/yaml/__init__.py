"""Rules in YAML: the document, its schema, reading and writing."""
