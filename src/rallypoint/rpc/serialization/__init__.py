"""What messages say: pickles, tensors and scripted functions as bytes, and what may be named in them."""
