"""The legacy server's side: one channel per session, whichever transport it speaks."""
