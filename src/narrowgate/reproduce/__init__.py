"""The paper again: records of our own runs, its tables and figures with ours beside them."""
