"""The parts of the sampler, one idea a module; `swapserve.sampler` puts them together."""
