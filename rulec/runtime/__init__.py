"""The steps of a rule over tensors: buckets, launches, the values between them."""
