"""The client's side: one HTTP request in, one reply out."""
