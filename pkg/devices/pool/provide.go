package pool

import "context"

// Create, Get, IDs and Capacity are the pool's, for who provisions.

func (b *Backend) Create(ctx context.Context, v Volume) (Volume, error) {
	return b.pool.Create(ctx, v)
}

func (b *Backend) Get(ctx context.Context, id string) (Volume, error) { return b.pool.Get(ctx, id) }

func (b *Backend) IDs(ctx context.Context) ([]string, error) { return b.pool.IDs(ctx) }

func (b *Backend) Capacity(ctx context.Context) (Capacity, error) { return b.pool.Capacity(ctx) }
