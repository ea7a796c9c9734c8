"""States of parameters: their store, quantized states, segments, and checks of saved states."""
