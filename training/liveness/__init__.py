"""Whether ranks make progress: heartbeats, limits of silence, and the rank to blame for a hang."""
