"""Recovery from a killed rank beside other programs, and what being ready for it costs."""
