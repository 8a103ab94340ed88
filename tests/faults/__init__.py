"""A campaign of faults on every engine: what becomes of the other ranks when one is killed, stops or fails.

``make faults N=200`` draws the cases; ``train.py`` is the script that they strike.
"""
