// Package state holds what the rest of the plugin talks about: what is wanted of
// a volume (Volume) and the edits by which that changes, what is seen of it
// (Actual), and what a failure means (Error). Package store keeps the wanted.
package state
