"""Samples of hosts and devices while a run trains, and the alerts that follow from them."""
