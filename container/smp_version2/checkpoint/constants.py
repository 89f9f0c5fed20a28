"""Keys that scripts put into the content of their checkpoints."""

#: Whether each rank has only a part of the content.
SMP_IS_PARTIAL_KEY = "smp_is_partial"
#: Content that describes how to load the rest.
SMP_IS_LOAD_INFO_KEY = "smp_is_load_info"
