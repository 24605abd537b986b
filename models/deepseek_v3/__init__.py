"""The DeepSeek-V3 family, to which Kimi K2, K2.5 and K2.6 belong."""
