"""Small states of other libraries, bitsandbytes and torchao: taken over from them, and handed over to them."""
