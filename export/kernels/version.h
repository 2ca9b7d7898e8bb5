#pragma once

#define SPORTSLLM_KERNELS_VERSION "3"
