"""Text around token ids: tokenizer, stop strings, chat templates. No tensors, no HTTP."""
