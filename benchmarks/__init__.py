"""Speed, measured beside other programs in one run."""
