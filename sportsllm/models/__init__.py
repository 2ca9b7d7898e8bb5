"""The shape of a model and its modules: config, presets, attention, feed-forward, the decoder, sizes. Imports
nothing of the other rooms.
"""
