"""The checkpoint server: holds the checkpoints of its node's workers and publishes them."""
