"""A cluster on one Linux machine, each node with a shaped compute NIC and a throttled storage NIC.

settings        what is wanted
machine         what this machine can give, and the names of everything a lab makes
s3_server       the S3 server of a lab: program, keys, command
steps           the steps that make a lab and those that undo it, as data
leftovers       what of a lab exists, found by name and not by memory
runner          carries steps out
cluster         up, status and down
janitor         a lab for the length of a block, gone whatever ends it
node_processes  commands on the nodes, under the supervisor
"""
