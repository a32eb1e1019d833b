"""What a simulation shows: figures with their numbers beside them, and one page that holds them all.

content: what is shown, as plain data · exposure: whose time a batch's time is · figures: PNG and CSV · page: HTML.
"""
