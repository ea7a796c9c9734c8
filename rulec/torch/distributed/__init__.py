"""DTensors and process groups: meshes, agreement, values that all ranks need."""
