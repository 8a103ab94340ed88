"""How the processes of a job are started, and what a launcher says of them."""
