"""DTensors and process groups: meshes, consensus on a step, values that all ranks need."""
