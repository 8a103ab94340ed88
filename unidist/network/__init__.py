"""How the processes of a job find and reach each other."""
