"""Starting the workers of a job on this machine and on others, looking after them, and ending them."""
