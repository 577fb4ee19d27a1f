"""From a corpus to batches: token shards, their manifest, and the resumable loader."""
