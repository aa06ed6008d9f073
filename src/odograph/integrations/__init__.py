"""Bridges to other libraries, each behind its own extra: nothing here is imported until it is asked for."""
