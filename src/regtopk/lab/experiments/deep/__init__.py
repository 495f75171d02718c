"""Deep networks trained by simulated workers on one device."""
