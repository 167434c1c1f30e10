package client

import (
	"context"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// Create calls CreateVolume.
func (c *Client) Create(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if err := c.needController(ctx, csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME); err != nil {
		return nil, err
	}
	resp, err := c.Controller.CreateVolume(ctx, req)
	return resp, explain(err, "create volume %s", req.GetName())
}

// Delete calls DeleteVolume.
func (c *Client) Delete(ctx context.Context, req *csi.DeleteVolumeRequest) error {
	if err := c.needController(ctx, csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME); err != nil {
		return err
	}
	_, err := c.Controller.DeleteVolume(ctx, req)
	return explain(err, "delete volume %s", req.GetVolumeId())
}

// List returns the entries of all pages of ListVolumes.
func (c *Client) List(ctx context.Context) ([]*csi.ListVolumesResponse_Entry, error) {
	if err := c.needController(ctx, csi.ControllerServiceCapability_RPC_LIST_VOLUMES); err != nil {
		return nil, err
	}
	var all []*csi.ListVolumesResponse_Entry
	seen := map[string]bool{}
	for token := ""; ; {
		resp, err := c.Controller.ListVolumes(ctx, &csi.ListVolumesRequest{StartingToken: token})
		if err != nil {
			return nil, explain(err, "list volumes")
		}
		all = append(all, resp.GetEntries()...)
		if token = resp.GetNextToken(); token == "" {
			return all, nil
		}
		if seen[token] {
			return nil, fmt.Errorf("list volumes: the driver answers with the next_token %q again and again", token)
		}
		seen[token] = true
	}
}
