"""Which language models of Transformers train under which mode, as it was measured."""
