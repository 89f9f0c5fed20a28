"""Code that is run on slices once it is proven right: position by position, channel by channel, and in backward passes."""
