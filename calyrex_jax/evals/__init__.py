"""Figures with intervals, and the reports that show them."""
