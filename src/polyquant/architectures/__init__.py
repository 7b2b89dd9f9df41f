"""Model families: tensor names, hyper-parameters and translation between naming schemes."""
