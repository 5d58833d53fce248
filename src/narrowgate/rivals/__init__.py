"""Other people's ways to decide which channels go; training, removal and report are the same for all of them."""
