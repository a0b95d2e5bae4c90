"""One exchange at work, whichever way its client is asked and its server is answered."""
