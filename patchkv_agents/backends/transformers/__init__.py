"""Models of Hugging Face Transformers: everything that touches their cache and attention."""
