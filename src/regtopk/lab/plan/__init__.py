"""What compression is worth on your link: measured costs in, step times out."""
