"""States of parameters: their store, quantized states, sections, and checks of saved states."""
