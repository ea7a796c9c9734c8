"""The rule library: one YAML file per rule; read through `rulec.load` and `rulec.rules`."""
