"""Starting the ranks of a job on one node or many, seeing to it that they all end, and starting them again."""
