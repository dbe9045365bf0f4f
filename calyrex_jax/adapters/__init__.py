"""Small trained modules that act on a frozen backbone's residual stream."""
