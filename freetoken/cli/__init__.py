"""Commands of `ft`. One small file each; torch is imported only by those that compute."""
