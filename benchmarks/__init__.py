"""Measurements beside other libraries and between methods; no part of the installed packages."""
