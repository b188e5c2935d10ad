mod hyper;
mod operations;
mod properties;
mod refusals;
mod retrieve;
